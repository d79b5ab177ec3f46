"""Values as columns of bytes, their checksums, and the messages of the data plane."""
