"""The role critic: values and the critic's training in processes of their own."""
