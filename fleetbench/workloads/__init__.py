"""What is trained: the registry's models and their data, with torch; real runs build them, and so can virtual trainers."""
