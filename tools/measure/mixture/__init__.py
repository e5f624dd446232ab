"""`measure mixture`: what is predicted of a mixture of experts, beside the clock."""
