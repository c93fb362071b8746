//! One body, compiled for the CPU at hand.

/// Defines `$name`, which runs its body compiled for AVX2 and FMA where the CPU has both, and
/// `$portable`, the same body for any CPU.
///
/// The body is written once, in plain Rust on fixed-size blocks, and left to the compiler to
/// vectorise. The compiler neither reorders nor fuses float operations, so both versions give the
/// same bits. What the body calls must be `#[inline(always)]`, or it is compiled for any CPU.
macro_rules! multiversion {
    (
        $(#[$attribute:meta])*
        $visibility:vis fn $name:ident, $portable:ident ($($argument:ident: $type:ty),* $(,)?) $body:block
    ) => {
        $(#[$attribute])*
        #[inline]
        $visibility fn $name($($argument: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($argument: $type),*) {
                    $portable($($argument),*)
                }
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                    // SAFETY: `avx2` is safe but for the CPU features it needs, which were just
                    // found to be there.
                    return unsafe { avx2($($argument),*) };
                }
            }
            $portable($($argument),*)
        }

        #[inline(always)]
        fn $portable($($argument: $type),*) $body
    };
}

pub(crate) use multiversion;
