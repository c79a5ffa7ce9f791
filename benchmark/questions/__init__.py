"""`sharesd bench mtbench | gsm8k | humaneval`: questions answered in all modes, and what is kept of it."""
