"""Operations on shapes of models they are served in, each with its proof and its floor."""
