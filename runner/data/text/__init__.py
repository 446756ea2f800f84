"""Text as data: read, turned into tokens once, kept, and cut into windows."""
