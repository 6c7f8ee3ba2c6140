"""gemmake: compiles a checkpoint and a hardware description into one `.gembin` artifact."""
