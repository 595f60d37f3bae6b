"""Pure functions that turn measurements into results: statistics, verdicts, tables, pages."""
