"""The runs of one controller: which are admitted, driven, kept and forgotten."""
