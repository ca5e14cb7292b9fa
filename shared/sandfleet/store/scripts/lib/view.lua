-- A sandbox as readers see it, or false.
local function view(sid, ms)
  local sb = call('HMGET', P .. 'sandbox:' .. sid, 'state', 'route', 'thread', 'user', 'backend', 'created', 'used',
    'restored')
  if not sb[1] then return false end
  local _, node = split(sb[2])
  return { sid, sb[1], sb[2], sb[3], sb[4], sb[5], sb[6], sb[7],
    sb[1] == 'live' and call('ZSCORE', P .. 'warm:' .. node, sid) or '',
    call('ZCOUNT', P .. 'agents:' .. sid, '(' .. ms, '+inf'), call('ZCOUNT', P .. 'busy:' .. sid, '(' .. ms, '+inf'),
    sb[8] or '' }
end
