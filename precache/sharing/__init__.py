"""A converted dataset on its way elsewhere: pushed, pulled, or exported as files."""
