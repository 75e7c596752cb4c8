"""How a rank shows that it lives, and who is at fault when a run stands still."""
