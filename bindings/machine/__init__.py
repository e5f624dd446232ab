"""Machines: backends, devices, where layers are placed, workers on other machines."""
