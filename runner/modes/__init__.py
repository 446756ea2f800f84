"""What a job can do besides training: be tried out, explained, evaluated, asked for predictions, sent to MLflow."""
