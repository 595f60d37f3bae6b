"""What converting a tree would bring, predicted from a sample of it."""
