"""Measurements. Each script writes one JSON to `results/`, from which pages and figures take every number they show."""
