"""Training engine on FSDP2: sharded over processes, packed without padding."""
