"""`sharesd bench gpu`: measurements on a GPU in half an hour at most, in steps that are processes with time limits."""
