"""What tests share: tiny models and checkpoints, scripted targets, enumeration, references in numpy
and torch."""
