"""Optimizers besides AdamW on the device: moments in host memory or in 8 bits, and Muon."""
