"""What a run leaves in its folder, and how one that was made before is found, trusted and begun again."""
