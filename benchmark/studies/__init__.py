"""Commands that look into one matter each."""
