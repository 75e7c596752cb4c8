"""`parallel3d-launch`: creates launch scripts for recipes, also for `parallel3d-plan
--emit-launch`, and checks nodes."""
