"""Generation: engines, workflows and rewards; groups in, scored samples out."""
