"""What a token leaves behind: the user's choice, checked, and the memory that it takes."""
