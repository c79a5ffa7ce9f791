"""The commands generate, chat and cache, and what other command lines share with it."""
