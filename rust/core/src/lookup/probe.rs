//! Samples of a prompt, where no group needs its start: what nobody has is found out without asking for all of it.

use super::group::{Group, Known, Query};
use super::{FIRST_WINDOW, Lookup, Phase};

/// Samples at most: with the window that is asked before them, a cold prompt costs at most 512 keys.
const MAX_SAMPLES: usize = 240;

/// Which chunks are asked for: the last one of unit 1, and of every `step`-th unit after it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Samples {
    group: usize,
    step: usize,
    /// Prefixes that need a sample: those that end in its unit, and so many minus one after it.
    reach: usize,
}

impl Samples {
    fn units(self, limit: usize) -> impl Iterator<Item = usize> {
        (1..=limit).step_by(self.step)
    }
}

impl Lookup {
    /// Samples first where the end of the longest prefix alone is many keys.
    pub(super) fn first_without_full(&self) -> Phase {
        let num_keys: usize = self.groups.iter().map(|group| group.needed(self.max_units).len()).sum();
        if num_keys > FIRST_WINDOW { self.probe_phase(self.max_units) } else { self.tail_phase(self.max_units) }
    }

    /// Of the group whose end reaches furthest, in steps as long as that where so few samples are enough.
    pub(super) fn probe_phase(&self, limit: usize) -> Phase {
        let reach_of = |group: &Group| group.tail.map_or(1, |tail| tail.saturating_sub(1) / group.chunks_per_unit + 1);
        let reaches = self.tail_groups().map(|(index, group)| (index, reach_of(group)));
        let longest = reaches.reduce(|best, next| if next.1 > best.1 { next } else { best });
        match longest {
            Some((group, reach)) if limit > 0 => {
                let step = reach.max(limit.div_ceil(MAX_SAMPLES));
                Phase::Probe { limit, is_rest: false, samples: Samples { group, step, reach } }
            }
            _ => self.tail_phase(limit),
        }
    }

    pub(super) fn enter_probe(&mut self, limit: usize, is_rest: bool, samples: Samples) {
        self.is_probed = true;
        self.make_room(limit);
        let group = &mut self.groups[samples.group];
        let (wanted, namespaces) =
            if is_rest { (Known::First, 1..group.num_namespaces) } else { (Known::Nothing, 0..1) };
        for unit in samples.units(limit) {
            let first_chunk = unit * group.chunks_per_unit - 1;
            if group.known[first_chunk] == wanted {
                group.known[first_chunk] = Known::Asked;
                let scale = group.hashes_per_chunk;
                let query = |namespace| Query { group: samples.group, namespace, first_chunk, num_chunks: 1, scale };
                self.queries.extend(namespaces.clone().map(query));
            }
        }
        if self.queries.is_empty() {
            let next = self.after_probe(limit, is_rest, samples);
            return self.enter(next);
        }
        self.num_keys_asked += self.num_keys();
    }

    pub(super) fn after_probe(&mut self, limit: usize, is_rest: bool, samples: Samples) -> Phase {
        if !is_rest && self.groups[samples.group].num_namespaces > 1 {
            return Phase::Probe { limit, is_rest: true, samples };
        }
        if samples.step > samples.reach {
            self.give_up_pieces(limit, samples);
        }
        self.tail_phase(limit)
    }

    /// Takes what lies between an absent sample and the next one for absent, unless it was asked for.
    fn give_up_pieces(&mut self, limit: usize, samples: Samples) {
        let group = &mut self.groups[samples.group];
        for unit in samples.units(limit) {
            if group.known[unit * group.chunks_per_unit - 1] != Known::Absent {
                continue;
            }
            for other in unit..(unit + samples.step).min(limit + 1) {
                let chunk = &mut group.known[other * group.chunks_per_unit - 1];
                if *chunk == Known::Nothing {
                    *chunk = Known::Absent;
                }
            }
        }
    }
}
