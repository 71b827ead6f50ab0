//! One step of stochastic gradient descent with momentum.

/// How one step changes a parameter.
pub(crate) struct Rule {
    pub(crate) rate: f32,
    pub(crate) momentum: f32,
    pub(crate) weight_decay: f32,
}

impl Rule {
    /// Updates the values and the velocity of a parameter.
    pub(crate) fn apply(&self, values: &mut [f32], velocities: &mut [f32], gradient: &[f32]) {
        for ((value, velocity), gradient) in values.iter_mut().zip(velocities).zip(gradient) {
            *velocity = self.momentum * *velocity + (gradient + self.weight_decay * *value);
            *value -= self.rate * *velocity;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_steps_as_pytorch_computes_them() {
        // torch.optim.SGD([p], lr=0.1, momentum=0.9, weight_decay=0.01), p = 1, gradients 0.5 and
        // -0.25.
        let rule = Rule { rate: 0.1, momentum: 0.9, weight_decay: 0.01 };
        let (mut value, mut velocity) = ([1.0f32], [0.0]);
        rule.apply(&mut value, &mut velocity, &[0.5]);
        assert!((value[0] - 0.949).abs() < 1e-6, "{value:?}");
        rule.apply(&mut value, &mut velocity, &[-0.25]);
        assert!((value[0] - 0.927_151).abs() < 1e-6, "{value:?}");
    }
}
