"""`parallel3d-launch`: a launcher for any recipe, of the templates that `parallel3d-plan
--emit-launch` fills, too."""
