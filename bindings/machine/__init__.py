"""Machines: backends, devices, the placement of layers, workers on other machines."""
