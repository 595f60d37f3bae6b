"""Attacks: pictures, folders, journals, kills, errors of the system, races, loaders; by seed and count."""
