"""Tests of a program that runs in another process: it cannot see, change or answer for what judges it."""
