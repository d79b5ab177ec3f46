"""Training engine ``reference``: one rank of plain transformers in float32."""
