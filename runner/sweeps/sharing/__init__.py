"""`share=true`: the jobs of a sweep train what they have in common once."""
