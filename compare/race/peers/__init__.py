"""What people would use instead: trainers of other libraries, which take turns with the entrants of a race."""
