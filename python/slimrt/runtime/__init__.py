"""A loaded model: its engine, its sessions, and what is folded while it is loaded."""
