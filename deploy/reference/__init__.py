"""What is written of the code: the references in docs/ and most of the Python client."""
