"""All that has to be measured on a machine with a GPU, by one command, step by step."""
