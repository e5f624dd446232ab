"""The commands of the measurements: their options, and what they print."""
