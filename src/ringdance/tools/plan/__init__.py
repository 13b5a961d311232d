"""``ringdance plan``: predict the speed, duration and cost of a job on other machines."""
