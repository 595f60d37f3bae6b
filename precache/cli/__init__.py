"""How a command runs, and what it says: on a terminal, as a table, as a page."""
