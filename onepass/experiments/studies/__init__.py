"""The smaller studies of the paper: which cells each needs, what they say, and their pictures."""
