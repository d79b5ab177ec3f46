"""Sources of prompts in Parquet files and in datasets of the Hugging Face hub."""
