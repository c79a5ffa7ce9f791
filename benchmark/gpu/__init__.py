"""`sharesd bench gpu`: measurements on a GPU within half an hour.

Each step is a process with a time limit.
"""
