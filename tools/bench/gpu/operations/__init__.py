"""Operations on shapes of served models, each with its proof and its floor."""
