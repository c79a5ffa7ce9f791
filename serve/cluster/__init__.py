"""Server on a Ray cluster: an ingress, and replicas of the application."""
