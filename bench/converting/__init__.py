"""What a conversion spends its time on, and how it compares with other writers."""
