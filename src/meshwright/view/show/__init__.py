"""What `meshwright show` prints and the page explores: collectives, pipeline schedules and lessons, each as data and as text."""
