-- The only clock: the server's. Milliseconds; numbers above 14 digits must never be concatenated with `..`.
local function now_ms()
  local t = call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local DAY = 86400000
local KEEP = 30 * DAY

-- Let a key live at least `ms` more; never shorten.
local function keep(key, ms)
  if call('PTTL', key) < ms then call('PEXPIRE', key, ms) end
end
