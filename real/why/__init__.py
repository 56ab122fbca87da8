"""Why a training is slow, seen from inside its processes."""
