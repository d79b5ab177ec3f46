"""Reward ``math_verify``: compares mathematical answers by their values."""
