"""Results of a comparison as files, tables, a page and events."""
