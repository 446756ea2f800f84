"""Interfaces of other libraries: code written for them runs here after a change of its imports."""
