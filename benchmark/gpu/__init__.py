"""`sharesd bench gpu`: measurements on a GPU within half an hour."""
