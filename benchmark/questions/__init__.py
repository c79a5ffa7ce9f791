"""`sharesd bench mtbench | gsm8k | humaneval`: questions answered in several modes."""
